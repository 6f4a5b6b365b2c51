"""Run the notebooks without a person: execution, the gate on their claims, HTML and the report."""
