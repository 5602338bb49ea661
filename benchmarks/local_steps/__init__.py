"""How fast, and how good, is training by local steps? See README.md."""
