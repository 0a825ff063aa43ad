"""The programs that run jobs on this machine. This file imports nothing: each is started alone."""
