"""How well a model predicts text: `evaluate` measures, everything it measured comes with its definition."""
