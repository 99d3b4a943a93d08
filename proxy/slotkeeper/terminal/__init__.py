"""What the commands print: figures for people, tables that fit, a request's account, the screen of `top`."""
