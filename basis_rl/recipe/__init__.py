"""A recipe, YAML and command line: its keys, how it is read, the objects that it names, the run that it makes."""
