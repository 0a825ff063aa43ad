"""The looks at a run from outside its trainer: hooks, the profiler, the replay of its updates."""
