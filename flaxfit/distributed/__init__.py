"""The processes of a run: which one this is, and how they meet."""
