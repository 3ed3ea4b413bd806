"""The pure core: tensors in, tensors out. No I/O, no logging, no clock, no global random state, no config objects."""
