from research.published.page import markdown

if __name__ == "__main__":
    print(markdown(), end="")
