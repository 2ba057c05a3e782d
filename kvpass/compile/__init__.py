"""The pass, one stage a file: normalise -> find -> rewrite -> lower -> report. Plans come from the scheme."""
