"""The league: which system is the fastest at equal GPU memory, on which machine, by how much, and how sure that is."""
