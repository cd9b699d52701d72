"""`python -m zsim`."""

from zsim.cli import main

if __name__ == "__main__":
    main()
