"""Which conversation a request continues, of what kind it is, and where and why it diverges."""
