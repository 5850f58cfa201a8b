"""Workers behind one small interface: their life, the registry, and the policies that choose."""
