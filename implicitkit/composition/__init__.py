"""Many fixed points as one: any graph of maps, solved and differentiated by its structure."""
