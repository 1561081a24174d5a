"""Where the process of `mamba2` begins: it can be interrupted without noise before `app` is imported."""


def main() -> int:
    """Run the command line and return the exit status."""
    try:
        from mamba_commands import app

        return app.main()
    except KeyboardInterrupt:  # while app is imported, or after it has done its work
        return 130
