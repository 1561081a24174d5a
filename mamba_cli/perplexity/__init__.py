"""How well a model predicts text.

texts (and data_sets) read a text, tokens encodes it, windows and plan say what is predicted from what,
score and evaluate do it, statistics, compare and report make the figures.
"""
