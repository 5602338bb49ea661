"""What `tfdist.ParameterServerStrategy` is made of: a coordinator, steps on workers, variables on parameter servers."""
