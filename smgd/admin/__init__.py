"""The admin socket: what operators ask of a running daemon, and `smgctl`, which asks it."""
