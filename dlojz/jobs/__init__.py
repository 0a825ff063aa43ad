"""The programs that run jobs on this machine. This face imports nothing: each is started alone."""
