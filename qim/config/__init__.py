"""How it is set: Appendix B as one typed table."""
