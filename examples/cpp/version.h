// Version pins.
#pragma once

#include <array>
#include <regex>
#include <sstream>
#include <string>

#include "errors.h"

// Whether a version fits all comparators of a pin. What is left out of a version is 0.
inline bool fits(const std::string& version, const std::string& pin) {
  static const std::regex form(R"( *(==|!=|>=|<=|>|<)? *(\d{1,9})(?:\.(\d{1,9}))?(?:\.(\d{1,9}))? *)");
  const auto parts = [](const std::string& text) {
    std::smatch part;
    if (!std::regex_match(text, part, form)) throw bad_argument("version", "write comparators, as in '>=1.2.0,<2.0.0'");
    const auto number = [&](int i) { return std::atoi(part.str(i).c_str()); };
    return std::pair{part.str(1), std::array{number(2), number(3), number(4)}};
  };
  if (pin.size() > 256) throw bad_argument("version", "write fewer comparators");  // the matcher recurses
  bool all = true;
  std::istringstream comparators(pin);
  for (std::string text; std::getline(comparators, text, ',');) {
    const auto [sign, wanted] = parts(text);
    const auto order = parts(version).second <=> wanted;
    all &= sign == "!=" ? order != 0 : sign == ">=" ? order >= 0 : sign == "<=" ? order <= 0
           : sign == ">" ? order > 0 : sign == "<" ? order < 0 : order == 0;
  }
  return all;
}
