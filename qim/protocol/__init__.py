"""What is said: header, opcodes, frames, reader, outbound scheduling, internal frames. Sans-I/O."""
