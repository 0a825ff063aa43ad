"""What this machine is: facts, meters, and the doctor who reads them.

Imports nothing of ours."""
