"""Paths, dtypes and plain forms of pytrees, and checks of arguments."""
