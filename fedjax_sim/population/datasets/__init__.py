"""This subpackage holds data sets: some come with the package, some are read from files, some are drawn at random."""
