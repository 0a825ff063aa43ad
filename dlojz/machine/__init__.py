"""What this machine is: processors, GPUs, meters, facts, and the doctor who reads them.

Imports nothing of ours from outside this room.
"""
