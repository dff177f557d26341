"""What this machine offers: devices, processors, memory. Imports utils/*.py."""
