"""``python -m homeport``: the same as the ``homeport`` command."""

from homeport.cli import app

if __name__ == "__main__":
    app(prog_name="homeport")
