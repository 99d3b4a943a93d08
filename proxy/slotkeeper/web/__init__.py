"""HTTP towards the clients: the data port and the admin port."""
