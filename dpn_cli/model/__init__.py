"""The network: stem, transformer, and which parts are trained."""
