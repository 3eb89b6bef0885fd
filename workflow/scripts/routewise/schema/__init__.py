"""The tables that Routewise writes, one module each. Imports nothing itself."""
