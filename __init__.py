"""The package tessera/ in this folder, if a program beside a clone called tessera imports that name."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

if __name__ == "tessera":  # not as a package of the tests
    _folder = Path(__file__).parent / "tessera"
    _spec = spec_from_file_location("tessera", _folder / "__init__.py", submodule_search_locations=[str(_folder)])
    assert _spec is not None and _spec.loader is not None, "of a file that is there"
    sys.modules["tessera"] = module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["tessera"])
