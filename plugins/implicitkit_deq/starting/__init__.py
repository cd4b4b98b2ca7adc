"""Where the search for an equilibrium begins: a value, the last equilibrium, or where its last changes lead."""
