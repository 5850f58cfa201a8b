"""Engines that smgd starts itself: what their command lines are, and who watches over them."""
