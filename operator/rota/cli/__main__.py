"""Entry point of `python -m rota.cli`."""

from rota.cli import main

if __name__ == "__main__":
    main(prog_name="rota")
