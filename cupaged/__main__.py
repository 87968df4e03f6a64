"""`python -m cupaged` is the `cupaged` command."""

from cupaged.cli.main import main

if __name__ == "__main__":
    main()
