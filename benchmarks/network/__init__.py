"""How fast is data-parallel training over slow networks?"""
