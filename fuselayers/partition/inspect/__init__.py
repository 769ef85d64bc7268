"""Look at what the fusion core does with a function: its graphs, what it saves and recomputes, and why."""
