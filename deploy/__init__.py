"""Where a model goes: exports and their runtimes, detection, launchers."""
