"""Keys, decisions and their table; tuning without shared state; who may win, and who is banned."""
