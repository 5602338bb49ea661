"""A function of a notebook or script under the launcher: `tfdist.launch`."""
