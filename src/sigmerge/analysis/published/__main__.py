from sigmerge.analysis.published import markdown

if __name__ == "__main__":
    print(markdown(), end="")
