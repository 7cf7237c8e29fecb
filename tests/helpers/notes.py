"""Notes that modules and methods of a test take outside of themselves, where the end of a visit resets nothing."""

# emptied before each test
noted = []


def note(*values):
    """Note a value, or several as a tuple."""
    noted.append(values[0] if len(values) == 1 else values)
