"""The two methods, each read like its paper; they share rooms, not a base class."""
