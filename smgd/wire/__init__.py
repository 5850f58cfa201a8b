"""Engine wires as plain structs and codecs: bytes to objects and back, without I/O."""
