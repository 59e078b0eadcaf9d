"""From measurements on the present GPU to the routes of a table. Needs torch; writing a table needs tomlkit."""
