"""The machinery of a run; the files of this folder are its ground floor and import each other alone."""
