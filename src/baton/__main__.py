"""`baton` and `python -m baton`: the command line, loaded where a Ctrl-C is one line as well."""

import sys


def main() -> int:
    """Run one command and return its exit code."""
    try:
        from baton.cli import main as command
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return command()


if __name__ == "__main__":
    sys.exit(main())
