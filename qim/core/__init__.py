"""What is true: identifiers, sequences, cursors and their laws. Pure values, no I/O, clock or randomness."""
