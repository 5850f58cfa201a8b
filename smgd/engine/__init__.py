"""Everything between a neutral request and a headless engine: session, dialects, guard, sockets."""
