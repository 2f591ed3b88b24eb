// The environment: fetch a key and take it to the door, on a grid. To host your own, replace this file and describe it
// in about.textproto. It does not depend on gRPC, and its state is plain data, so that a turn can be tried on a copy.
#pragma once
#include <array>
#include <cstdint>
#include <string>

// SplitMix64 (Steele, Lea, Flood 2014): the same numbers on every machine.
inline std::uint64_t mix(std::uint64_t value) {
  value += 0x9E3779B97F4A7C15;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
  return value ^ (value >> 31);
}

class KeyDoor {
 public:
  // The start depends only on `seed`, and slips depend only on `dynamics_seed`.
  KeyDoor(std::uint64_t seed, std::uint64_t dynamics_seed) : luck_(mix(seed)) {
    do
      for (auto* place : {&agent_, &key_, &door_}) *place = {draw(kSize), draw(kSize)};
    while (agent_ == key_ || key_ == door_ || door_ == agent_);
    luck_ = mix(dynamics_seed);
  }

  struct Result { bool effective, solved; double reward; };
  Result step(int action) {
    if (!draw(10)) action = draw(4);
    if (!allows(action)) return {false, false, 0.0};
    agent_ = beside(action);
    const bool found = !has_key_ && agent_ == key_, solved = has_key_ && agent_ == door_;
    has_key_ = has_key_ || found;
    return {true, solved, solved ? 1.0 : found ? 0.25 : 0.0};
  }
  bool allows(int action) const { return static_cast<unsigned char>(beside(action)[action % 2]) < kSize; }
  int expert_action() const { return away(0) ? (away(0) < 0 ? 0 : 2) : (away(1) < 0 ? 3 : 1); }

  std::string observation() const {  // "key Right 1 Down 2": always five words
    const auto way = [](int steps, const char* less, const char* more) {
      return (steps < 0 ? less : steps ? more : " - ") + std::to_string(steps < 0 ? -steps : steps);
    };
    return (has_key_ ? "door" : "key") + way(away(0), " Left ", " Right ") + way(away(1), " Up ", " Down ");
  }
  std::string state_key() const {  // without history and random state; short enough to need no digest
    return {agent_[0], agent_[1], key_[0], key_[1], door_[0], door_[1], static_cast<char>(has_key_)};
  }

 private:
  using Place = std::array<char, 2>;  // x and y, from the upper left
  char draw(unsigned bound) { return static_cast<char>(mix(luck_++) % bound); }
  int away(int axis) const { return (has_key_ ? door_ : key_)[axis] - agent_[axis]; }
  Place beside(int action) const {
    Place to = agent_;
    action == 1 || action == 2 ? ++to[action % 2] : --to[action % 2];
    return to;
  }

  static constexpr unsigned kSize = 5;
  Place agent_, key_, door_;
  bool has_key_ = false;
  std::uint64_t luck_;
};
