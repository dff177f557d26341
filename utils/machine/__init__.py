"""What this machine offers: devices, processors, memory. Imports the ground floor."""
