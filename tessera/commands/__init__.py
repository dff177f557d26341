"""The commands: links to train.py, val.py, detect.py, export.py and compare.py."""

from pathlib import Path

if Path(__file__).parent.with_name("utils").is_file():  # a text file in place of a link, as in a ZIP on Windows
    __path__[:] = [str(Path(__file__).parents[2])]
