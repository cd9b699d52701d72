"""The program `zsim`, also as `python -m zsim`."""

from zsim import garbage_collection


def main() -> None:
    """Run the command line, with few searches for cycles from its first import on."""
    garbage_collection.raise_threshold()
    from zsim.cli import main as run

    run()


if __name__ == "__main__":
    main()
