"""flaxfit."""
